package config

// Result is what the files say, and what is wrong with them.
type Result struct {
	// Config is made of every table that is right. A driver's table counts as a whole;
	// in [kubelet] and [log] a value that is wrong counts as not written.
	Config *Config
	// Files are the files that were read, in the order in which they were applied.
	Files []string
	// Hidden are files that do not count because one of the same name, which may be
	// empty or a link to /dev/null, is in a place before theirs.
	Hidden []Hidden
	// Mistakes of all files, in the order of the files, then of the lines.
	Mistakes Mistakes
	// Warnings are no reason to refuse the configuration.
	Warnings []Mistake
	// Faulty names the drivers whose tables have a mistake and so are not in Config,
	// sorted. What can be no driver's name is not among them.
	Faulty []string

	origins map[string]position
}

// Origin tells where the value of a key is, such as driver."nfs.csi.k8s.io".timeout:
// "FILE:LINE", or "default" if no file has it.
func (r *Result) Origin(key string) string {
	if at, written := r.origins[key]; written {
		return at.String()
	}
	return "default"
}

// Load reads the files. It never fails as a whole: what cannot be read is a mistake.
func Load(s Source) *Result {
	found := s.list()
	l := newLoader(userExists)
	l.mistakes = found.mistakes
	for _, f := range found.files {
		l.rank[f.path] = f.rank
		data, wrong := s.read(f)
		switch {
		case wrong != nil:
			l.mistakes = append(l.mistakes, *wrong)
		case data != "": // nothing in it: it only hides others
			l.read = append(l.read, f.path)
			l.apply(f, data)
		}
	}
	r := l.result()
	r.Hidden = found.hidden
	return r
}
