"""What engine_rules.py reads engines' sources with: a tree of modules, an interpreter of loaders,
what it is asked.
"""
