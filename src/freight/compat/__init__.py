"""Other tools' interfaces, for scripts that were written for them; users import them as
`freight.auto_fp8`, `freight.llm_compressor`, `freight.lm_eval` and `freight.transformers`.
"""
