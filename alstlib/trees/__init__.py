"""Training on trajectories that share prefixes, such as samples of one prompt or branches of an agent's episode: a
shared prefix is computed once.

`trie` makes a tree of the tokens that trajectories share, and `tree_step` runs a model on it, forward and backward,
with the memory of one path from the root to a leaf.
"""
