"""What is measured, one module for each row of the table."""
