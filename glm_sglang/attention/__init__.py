"""Multi-head attention of short prompts on a GPU: SGLang's own, with its keys assembled in one pass."""
