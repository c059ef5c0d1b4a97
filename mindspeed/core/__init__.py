"""Names that other projects import on NPUs; each forwards to where the work is done."""
