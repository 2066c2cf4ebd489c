"""Importers: what people already have (logs, dumps, exports, traces, crash reports) becomes rows of a ledger.

A format is one function that reads and one that recognises, entered as one row of `formats.FORMATS`:

    def fits(source: Source) -> bool: ...                                # by source.head (64 KiB) and source.path
    def read(source: Source, notes: Notes) -> Iterator[Row]: ...         # streaming, bounded memory, nothing executed

`Source` (source.py) is one file, unpacked while it is read: `source.open()` gives bytes, `source.lines()` gives
(number, text) with every line bounded, `source.head` its first 64 KiB. A row carries what the file says of `step`,
`stage`, `rank`; rows of one rank go to one part (`rank=None`: the part of the driver). Numbers keep the framework's name
in `raw_name` and have the canonical one in `name` (`names.Names`). What cannot be read is not silently left out:
`notes.skip(reason, line)`. What the file says of the run itself (framework, version, configuration) goes to `notes`.
A file that is of no use at all raises BadInput.
"""
