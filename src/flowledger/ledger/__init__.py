"""The book: row types, append-only writer, DuckDB reader."""
