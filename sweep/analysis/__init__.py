"""Read a sweep: tables, checks, comparisons and audits."""
