package status

import "time"

// Document is the whole: the document of `status --json` and GET /v1/status.
type Document struct {
	Version         string    `json:"version"`
	StartedAt       time.Time `json:"started_at"`
	ConfigFiles     []string  `json:"config_files"`
	ConfigError     string    `json:"config_error,omitempty"` // the errors of the files, one a line; absent while there are none
	PluginsRegistry string    `json:"plugins_registry"`
	Drivers         []Driver  `json:"drivers"` // by name
	// Polling says why changes are looked for each second instead of being reported by the
	// kernel (inotify); empty while all is well.
	Polling string      `json:"polling,omitempty"`
	Stuck   []StuckCall `json:"stuck,omitempty"`

	VolumesError string `json:"-"` // why `status` does not know the volumes
}

// StuckCall is a system call that was abandoned, for the file system of Path does not answer.
type StuckCall struct {
	Path  string    `json:"path"`
	Since time.Time `json:"since"`
}

// Driver finds a driver by name.
func (s Document) Driver(name string) (Driver, bool) {
	for _, d := range s.Drivers {
		if d.Name == name {
			return d, true
		}
	}
	return Driver{}, false
}

// Pending lists the enabled drivers that are not registered.
func (s Document) Pending() []Driver {
	var out []Driver
	for _, d := range s.Drivers {
		if d.State != Disabled && d.State != "registered" {
			out = append(out, d)
		}
	}
	return out
}
