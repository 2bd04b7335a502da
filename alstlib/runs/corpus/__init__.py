"""From a user's files to documents of tokens, for the programs and the lessons. The core does not need it: a DataLoader
of your own takes its place.

In the order in which to read it: `formats` knows what rows of a dataset hold, `reading` opens files and datasets and
finds a tokenizer, and `samples` tokenizes and packs, and counts what trains nothing; `image_rows` reads rows with
images.
"""
