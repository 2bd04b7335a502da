"""Layers that run in chunks of tokens, and models that run in blocks, so that working memory does not grow with the
sequence.

`chunked` runs a decoder layer chunk by chunk over one growing set of keys and values, which lie in `pages`;
`blocks` holds the pages of all layers of a model that runs block by block. What layers with a state hand on in the
place of keys and values is `streaming.carried`.
"""
