"""One module for each revision of the schema, in the order of their numbers."""
