"""What `python FILE.py` draws, forks and prints at the end of a file of the book.

No file here knows the book: what it shows, numbers or functions, is handed over.
"""
