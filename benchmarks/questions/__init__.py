"""What benchmarks/paired_questions.py consists of: published questions, answered under several caches
and compared pairwise.
"""
