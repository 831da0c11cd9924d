"""Which modules of transformers and PEFT are patched, and how: tables, and checks that a row describes a module.

This is the only place with transformers class names. `find_site` of `rules.py` asks the rules of one table in order and
returns how a module is patched, or why it is left alone (`sites.py`).
"""
