"""What differs between releases of SGLang, a module for each line of them."""
