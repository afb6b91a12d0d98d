"""What every part uses: files, fields of JSON, the terminal, tables, pictures, patterns, child processes."""
