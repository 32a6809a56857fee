"""Which computed tokens can be used again, and who owns which page. Ids only; torch-free."""
