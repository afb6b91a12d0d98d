"""Embeddings, scores and classes: APIs of OpenAI, Cohere, Jina, vLLM and TEI, for a model that pools."""
