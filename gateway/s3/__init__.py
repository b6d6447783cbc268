"""The S3 face: who asks for what, and how it is answered in S3's words."""
