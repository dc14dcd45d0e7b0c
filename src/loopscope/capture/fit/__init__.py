"""Finding out what a router returns, by running copies of it with random weights; the model itself is never run.

`random_copy` makes the copies, `trial` runs one and notes every value that crosses a module boundary, `routing_fit`
looks for the descriptions of `loopscope.capture.routing` that explain them, `unit` finds the modules to copy.
"""
