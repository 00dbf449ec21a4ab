"""The commands of ``everstep``, one module for each group. Importing one loads nothing heavy."""
