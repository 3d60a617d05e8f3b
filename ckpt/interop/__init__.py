"""Other systems' checkpoints: zeroband's and Cosmos's folders and torch DCP, read safely, written, converted.

Nothing here runs code that a file brings along. What can only be read by unpickling is refused, and the error names
the flag that allows it for files that one trusts.
"""
