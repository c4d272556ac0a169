"""kvxfer inside other frameworks: one module each, imported by name, with the extra of the same name."""
