"""Text of conversations: templates, tokenising, detokenising, stop strings, resent histories.

:class:`~sessionkv.text.model.TextModel` is the way in. Uses ``tokenizers`` and sandboxed
``jinja2`` only; knows nothing of engine, sockets or storage.
"""
