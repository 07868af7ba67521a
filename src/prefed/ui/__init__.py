"""What people see: the command line, pages, and the collection of preferences."""
