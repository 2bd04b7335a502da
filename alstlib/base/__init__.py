"""The ground that everything stands on.

`options` and `config` say what a user asks for, `mesh` which ranks do it, `sizing` how large a tile, a bucket or a
share of the host is, `units` how quantities are written. `recompute` has what a second pass needs of the first.
`reference` is the plain version of every operator: the oracle of the tests.
"""
