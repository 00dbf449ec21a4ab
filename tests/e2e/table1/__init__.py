"""The symptoms of the paper's Table 1, each from what makes it to what stands in the ledger."""
