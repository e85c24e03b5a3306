package cli

// commands is the table of all commands, in the order that help shows.
func commands() []command {
	return []command{
		{name: "version", summary: "print the version", setup: setupVersion},
		{name: "help", args: "[COMMAND]", summary: "explain the commands", setup: plain(runHelp)},
	}
}
