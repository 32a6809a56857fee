"""Chat meaning: conversations become token ids, token ids become events. Torch-free.

    conversation   what was said, whatever the protocol        events   what the model answers
    template       Jinja as the reference renders it           tokenizer, inert   text <-> ids
    codec          Conversation -> Prompt, token stream -> events
    stream_parser  one state machine over the answer's text    parsers/   one file, one call format

The room knows no protocol, no engine and no model; it hands integers over.
"""
