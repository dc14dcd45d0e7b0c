"""What every table, column, gauge and alert rule is, said once; everything that lists them derives from here.

The lowest room but `errors`: it imports NumPy and nothing else.
"""
