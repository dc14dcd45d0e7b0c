"""One file per tracker; its name is the tracker's. A file has:

`PACKAGES`: the modules that it imports, inside `start`; `INSTALL`: what to run when one is missing;
`start(TrackerStart) -> Tracker`: starts it, or raises.
"""
