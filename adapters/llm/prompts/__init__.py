"""Prompts: from texts, chats, token ids and rows of a data set to the token ids that a model reads."""
