"""Models: preparing their files, the decoder, sampling."""
