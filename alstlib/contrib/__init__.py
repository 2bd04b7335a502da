"""What builds on the core and has no promise to combine with everything. It has tests of its own.

`sparse` chooses the pages of keys that chunks of queries see; its test has the plain version of that choice.
"""
