"""Files of a prepared corpus: tokens (``.bin``), index (``.idx``) and manifest (``.json``)."""
