"""The experiments of the detectability paper (arXiv 2609.22337, sections V and VI), one module each."""
