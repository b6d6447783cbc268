"""The product's version, in one place; the distribution's metadata reads it too."""

VERSION = "0.1.0"
