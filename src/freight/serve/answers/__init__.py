"""The text of an answer: regions, reasoning, tool calls, and the grammars that force them."""
