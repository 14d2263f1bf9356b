"""Conversion of other trainers' run scripts and configurations into a configuration of megarl; nothing is executed.

`shell_script` reads the launch command of a bash script, `tables` says what a trainer's keys are in megarl,
`conversion` applies a table to the settings that were found, and `document` writes the result.
"""
