{{- define "kvferry.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- /* 40 characters: room for the longest suffix and a pod's hash within 63. */ -}}
{{- define "kvferry.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvferry.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvferry.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- /* Selector labels never change over a release's life: the API refuses it. Takes (root, component). */ -}}
{{- define "kvferry.selector" -}}
app.kubernetes.io/name: {{ include "kvferry.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Takes (root, image). A digest wins over the tag; an empty tag is the chart's own version. */ -}}
{{- define "kvferry.image" -}}
{{- $image := .image -}}
{{- $name := list $image.registry $image.repository | compact | join "/" -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end }}

{{- /* Where things lie in the containers. The run directory is made by the sidecar itself, private
to its uid: the mount point of a volume never is. Both sides must name it by one path. */ -}}
{{- define "kvferry.mountDir" -}}/run/kvferry{{- end }}
{{- define "kvferry.poolDir" -}}{{ ternary "/dev/hugepages" "/dev/shm" (ne .Values.pool.hugepages "") }}{{- end }}
{{- define "kvferry.runDir" -}}
{{- if eq .Values.mode "daemonset" -}}
/run/kvferry/{{ include "kvferry.poolName" . }}
{{- else -}}
/run/kvferry/node
{{- end -}}
{{- end }}
{{- define "kvferry.connectorDir" -}}/opt/kvferry/connector{{- end }}
{{- define "kvferry.configDir" -}}/etc/kvferry{{- end }}
{{- define "kvferry.diskDir" -}}/var/lib/kvferry{{- end }}
{{- define "kvferry.secretsDir" -}}/etc/kvferry-secrets{{- end }}
{{- define "kvferry.poolName" -}}{{ include "kvferry.fullname" . }}{{- end }}
