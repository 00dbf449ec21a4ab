"""What several kinds of tests share: the counter job, a running world, the judge."""
