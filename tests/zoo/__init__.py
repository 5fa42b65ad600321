"""Faults between sampler and trainer, made by really running things differently.

The doctor (`insight.doctor`) names the cause of a mismatch. Here it is tested from outside: an inference server and
a trainer that share no code with the package (`machines`: `generate` and eager modules of Hugging Face) take real steps
(`steps`) with one thing wrong (`test_zoo`). What a bug does to numbers, the code of the bug does.
"""
