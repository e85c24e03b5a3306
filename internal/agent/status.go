package agent

import (
	"time"

	"csi-registrar/internal/registrar"
)

// Status is the whole: the document of `status --json` and GET /v1/status (spec §7).
type Status struct {
	Version         string             `json:"version"`
	StartedAt       time.Time          `json:"started_at"`
	ConfigFiles     []string           `json:"config_files"`
	ConfigError     string             `json:"config_error,omitempty"` // the mistakes of the files, one a line; absent while they are right
	PluginsRegistry string             `json:"plugins_registry"`
	Drivers         []registrar.Status `json:"drivers"` // by name
}

// Driver finds a driver by name.
func (s Status) Driver(name string) (registrar.Status, bool) {
	for _, d := range s.Drivers {
		if d.Name == name {
			return d, true
		}
	}
	return registrar.Status{}, false
}

// Pending lists the enabled drivers that are not registered.
func (s Status) Pending() []registrar.Status {
	var out []registrar.Status
	for _, d := range s.Drivers {
		if d.State != registrar.Disabled && d.State != "registered" {
			out = append(out, d)
		}
	}
	return out
}
