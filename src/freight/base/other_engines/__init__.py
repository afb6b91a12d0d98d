"""Names of other engines (vLLM, Aphrodite, SGLang, TGI, llama.cpp), and what to use in their place."""
