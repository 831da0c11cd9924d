"""How results are shown: texts and tables on a console, pages, pictures. It knows nothing of models.

`Report` is the base of every result that prints and serialises; `Table` is the one form of a table, for the console
and for pages.
"""
