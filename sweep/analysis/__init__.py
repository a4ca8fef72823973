"""Reading a finished or running sweep: tables, comparisons and what they cannot show."""
