"""Other tools' interfaces, for their scripts.

Users import them as `freight.auto_fp8`, `freight.llm_compressor`, `freight.lm_eval` and
`freight.transformers`.
"""
