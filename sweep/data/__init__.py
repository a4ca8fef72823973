"""Data: what it is, and its tokens.

`identity.identify_data` says what goes into trial ids, and is all that planning needs.
`tokens.prepare_data` makes the tokens, once. `stream.SequenceStream` says in which order training
sees them.
"""
