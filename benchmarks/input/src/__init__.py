"""An experiment that only measures the speed of reading its datasets."""
