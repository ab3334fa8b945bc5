"""Tokenizers of every modality: `encoding` has those of text, `outside` opens those of
`transformers`, `copies` keeps a tokenizer beside a saved model, `files` reads tokenizer.json. A
modality's `load_tokenizer` knows its specs."""
