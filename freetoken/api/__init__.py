"""HTTP: wire bytes in and out of Conversations and Events, for every protocol the server speaks.

Knows no model and no device, only the face in `face`; one file, one protocol.
"""
