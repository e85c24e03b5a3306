package safetext

// Claim is a path, the name of a unit or an ID as another program reports it: the daemon to a
// command of root. It is no string, so that it cannot be used as one by accident; String returns it
// for people.
type Claim string

// String returns the claim as Word does; empty if it is empty.
func (c Claim) String() string {
	if c == "" {
		return ""
	}
	return Word(string(c))
}

// Checked returns the value if ok accepts it: compared with the configuration files, or with what
// the kernel and systemd say. Otherwise it is empty.
func (c Claim) Checked(ok func(value string) bool) string {
	if c == "" || !ok(string(c)) {
		return ""
	}
	return string(c)
}
