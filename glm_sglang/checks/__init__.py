"""The doctor's questions, each a function that answers with findings.

Importing this package imports nothing heavy.
"""
