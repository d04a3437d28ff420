"""One self-contained page out of results: tables, plots, machines, versions, commands, and what was not measured."""
